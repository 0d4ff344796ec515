-- Quality and readiness.
--
-- Readiness is what admission says of a trajectory: the functions `readiness_json` and
-- `unmet_step_conditions_json` call its rules. There is no row before a policy is in force.

CREATE VIEW findings AS
    SELECT run_id, trajectory_id, f.rule, f.step_id, f.score, f.evidence, kafka_timestamp
    FROM (SELECT run_id, trajectory_id, kafka_timestamp, unnest(findings) AS f FROM assessments);

COMMENT ON COLUMN findings.rule IS 'Quality rule, `name@version`.';
COMMENT ON COLUMN findings.step_id IS 'Step that it is about; null: the whole trajectory.';
COMMENT ON COLUMN findings.score IS
    'Score in [0, 1]; null: the rule failed, and counts for nothing.';
COMMENT ON COLUMN findings.evidence IS 'Evidence that the rule gives.';

CREATE VIEW step_quality AS
    SELECT run_id, trajectory_id, group_id, channel, s.step_id, s.index AS step_index, s.quality,
        s.assessed_quality, s.trainable, s.reason AS untrainable_reason, s.tags, s.response_tokens,
        s.oldest_sync_index
    FROM (SELECT run_id, trajectory_id, group_id, channel, unnest(steps) AS s
          FROM latest_candidates());

COMMENT ON COLUMN step_quality.step_id IS 'Step: `<call id>.<choice>`.';
COMMENT ON COLUMN step_quality.step_index IS 'Index of the step in its trajectory, from 0.';
COMMENT ON COLUMN step_quality.quality IS
    'Quality in [0, 1]: a curation''s if there is one, else the assessment''s; null: not scored.';
COMMENT ON COLUMN step_quality.assessed_quality IS
    'Quality in [0, 1] by the quality rules alone; null: not assessed.';
COMMENT ON COLUMN step_quality.trainable IS 'True: it can be trained.';
COMMENT ON COLUMN step_quality.untrainable_reason IS
    'Why the step or trajectory can''t be trained; null: it can.';
COMMENT ON COLUMN step_quality.tags IS
    'Names of the step''s tags and of its curations'' labels.';
COMMENT ON COLUMN step_quality.response_tokens IS 'Number of sampled tokens.';
COMMENT ON COLUMN step_quality.oldest_sync_index IS
    'Lowest sync index of this run among its tokens; null: no version of this run.';

-- A candidate as the JSON of a `ClosedMember` of admission: `verdicts.py` reads it.
CREATE MACRO member_json(c, staleness) AS to_json({'candidate': c, 'staleness': staleness,
    'place': CASE WHEN c.payload_topic_id IS NOT NULL THEN {
        'topic_id': c.payload_topic_id, 'partition': c.payload_partition,
        'first_offset': c.payload_first_offset, 'last_offset': c.payload_last_offset} END});

-- Newest candidates with the policy in force and the newest sync index of their run.
CREATE MACRO admission_candidates() AS TABLE
    SELECT c.*, c AS candidate, a.policy_json, n.newest
    FROM (
            SELECT * REPLACE (epoch_ms(opened_at) AS opened_at, epoch_ms(closed_at) AS closed_at)
            FROM latest_candidates()
        ) c JOIN (
            SELECT run_id, channel, policy_json FROM run_events_raw WHERE kind = 'policy_applied'
            QUALIFY row_number() OVER (
                PARTITION BY run_id, channel
                ORDER BY admission_policy_version DESC, kafka_timestamp DESC) = 1
        ) a ON a.run_id = c.run_id AND a.channel = c.channel
        LEFT JOIN (
            SELECT run_id, max_by(sync_index, (kafka_timestamp, kafka_offset)) AS newest
            FROM weights_raw GROUP BY run_id
        ) n ON n.run_id = c.run_id;

-- The training reward as `schemas/reward_matching.py` has it: the weighted sum of the rewards of
-- the whole trajectory. An empty map of weights weighs each reward with 1.
CREATE MACRO training_reward_of(given, weights) AS
    list_sum([v.value * CASE WHEN cardinality(weights) = 0 THEN 1
            ELSE weights[v.source || '/' || v.name] END
        FOR v IN given IF v.step_id IS NULL AND v.value IS NOT NULL AND (cardinality(weights) = 0
            OR map_contains(weights, v.source || '/' || v.name))]);

-- other_policy: JSON of the policy; null: that in force for run and channel.
CREATE MACRO readiness_under(other_policy) AS TABLE
    SELECT run_id, trajectory_id, group_id, channel, revision,
        (policy->>'policy_version')::BIGINT AS admission_policy_version,
        len(r.unmet_conditions) = 0 AS ready, r.awaiting_input,
        1 - len(r.unmet_conditions) / 8 AS score, r.unmet_conditions, r.staleness,
        r.trainable_tokens, r.training_reward, quality, kafka_topic_id
    FROM (SELECT *, coalesce(other_policy, policy_json) AS policy,
            from_json(readiness_json(member_json(candidate, NULL), policy, newest), '{
                "unmet_conditions": ["VARCHAR"], "awaiting_input": "BOOLEAN",
                "staleness": "BIGINT", "trainable_tokens": "BIGINT",
                "training_reward": "DOUBLE"}') AS r
        FROM admission_candidates());

CREATE VIEW readiness AS SELECT * FROM readiness_under(NULL);

COMMENT ON COLUMN readiness.revision IS 'Candidate revision that is evaluated: the newest.';
COMMENT ON COLUMN readiness.admission_policy_version IS
    'Version of the admission policy that applies to it; the policy is in `run_events`.';
COMMENT ON COLUMN readiness.ready IS 'True: the policy in force takes it.';
COMMENT ON COLUMN readiness.awaiting_input IS
    'True: its only unmet condition is a reward or an assessment, which may still arrive.';
COMMENT ON COLUMN readiness.score IS
    'Share of the conditions for training that are met, in [0, 1].';
COMMENT ON COLUMN readiness.unmet_conditions IS
    'Conditions that are not met, named as the reasons of admission.';
COMMENT ON COLUMN readiness.staleness IS
    'Versions between its oldest trainable token and the newest published version; null: unknown.';
COMMENT ON COLUMN readiness.trainable_tokens IS 'Sampled tokens that would be trained.';
COMMENT ON COLUMN readiness.training_reward IS
    'Sum of the rewards of the whole trajectory, each times its weight; null: there is none.';
COMMENT ON COLUMN readiness.quality IS
    'Quality in [0, 1]: a curation''s if there is one, else the assessment''s; null: not scored.';

CREATE VIEW step_readiness AS
    SELECT run_id, trajectory_id, group_id, channel, s.step_id, s.index AS step_index,
        (policy_json->>'policy_version')::BIGINT AS admission_policy_version,
        len(unmet_conditions) = 0 AS ready, 1 - len(unmet_conditions) / 4 AS score,
        unmet_conditions, newest - s.oldest_sync_index AS staleness, s.quality
    FROM (SELECT *, unnest(steps) AS s, unnest(from_json(unmet_step_conditions_json(
            member_json(candidate, NULL), policy_json, newest), '[["VARCHAR"]]'))
            AS unmet_conditions
        FROM admission_candidates());

COMMENT ON COLUMN step_readiness.step_id IS 'Step: `<call id>.<choice>`.';
COMMENT ON COLUMN step_readiness.step_index IS 'Index of the step in its trajectory, from 0.';
COMMENT ON COLUMN step_readiness.admission_policy_version IS
    'Version of the admission policy that applies to it; the policy is in `run_events`.';
COMMENT ON COLUMN step_readiness.ready IS 'True: the policy in force takes the step.';
COMMENT ON COLUMN step_readiness.score IS
    'Share of the conditions for training that are met, in [0, 1].';
COMMENT ON COLUMN step_readiness.unmet_conditions IS
    'Conditions that are not met: untrainable, tagged, quality, stale.';
COMMENT ON COLUMN step_readiness.staleness IS
    'Versions between its oldest trainable token and the newest published version; null: unknown.';
COMMENT ON COLUMN step_readiness.quality IS
    'Quality in [0, 1]: a curation''s if there is one, else the assessment''s; null: not scored.';
