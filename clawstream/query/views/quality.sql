-- Quality and readiness.
--
-- Readiness repeats the rules of `stream_jobs/admit/eligibility.py` in SQL, so that one query covers
-- a million rows; a test compares both. There is no row before a policy is in force.

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

-- Newest candidates with the policy `p`, the `newest` sync index of the run, and their steps with
-- the unmet conditions. other_policy: JSON of the policy; null: that in force for run and channel.
CREATE MACRO evaluated_candidates(other_policy) AS TABLE
    WITH applied AS (
        SELECT run_id, channel, from_json(coalesce(other_policy, policy_json), '{
            "policy_version": "BIGINT", "required_rewards": ["VARCHAR"],
            "reward_weights": "MAP(VARCHAR, DOUBLE)", "max_staleness": "BIGINT",
            "min_trainable_tokens": "BIGINT", "max_trajectory_tokens": "BIGINT",
            "train_outcomes": ["VARCHAR"], "min_quality": "DOUBLE", "untrained_tags": ["VARCHAR"],
            "min_step_quality": "DOUBLE", "require_assessment": "BOOLEAN"}') AS p
        FROM run_events_raw WHERE kind = 'policy_applied'
        QUALIFY row_number() OVER (
            PARTITION BY run_id, channel
            ORDER BY admission_policy_version DESC, kafka_timestamp DESC) = 1
    ), trains AS (
        SELECT run_id, max_by(sync_index, (kafka_timestamp, kafka_offset)) AS newest
        FROM weights_raw GROUP BY run_id
    ), known AS (
        SELECT c.*, a.p, t.newest,
            CASE WHEN c.channel = 'train' THEN a.p.max_staleness END AS staleness_limit
        FROM latest_candidates() c
            JOIN applied a ON a.run_id = c.run_id AND a.channel = c.channel
            LEFT JOIN trains t ON t.run_id = c.run_id
    )
    SELECT *, [{
        'step_id': s.step_id, 'index': s.index, 'tokens': s.response_tokens,
        'oldest': s.oldest_sync_index, 'quality': s.quality, 'trainable': s.trainable,
        'excluded': list_has_any(s.tags, p.untrained_tags)
            OR coalesce(s.quality < p.min_step_quality, false),
        'unmet_conditions': [x FOR x IN [
            CASE WHEN NOT s.trainable THEN 'untrainable' END,
            CASE WHEN list_has_any(s.tags, p.untrained_tags) THEN 'tagged' END,
            CASE WHEN s.quality < p.min_step_quality THEN 'quality' END,
            CASE WHEN newest - s.oldest_sync_index > staleness_limit THEN 'stale' END
        ] IF x IS NOT NULL]
    } FOR s IN steps] AS evaluated_steps FROM known;

-- The training reward as `schemas/reward_matching.py` has it: the weighted sum of the rewards of
-- the whole trajectory. An empty map of weights weighs each reward with 1.
CREATE MACRO training_reward_of(given, weights) AS
    list_sum([v.value * CASE WHEN cardinality(weights) = 0 THEN 1
            ELSE weights[v.source || '/' || v.name] END
        FOR v IN given IF v.step_id IS NULL AND v.value IS NOT NULL AND (cardinality(weights) = 0
            OR map_contains(weights, v.source || '/' || v.name))]);

CREATE MACRO readiness_under(other_policy) AS TABLE
    WITH split AS (
        SELECT *, list_has_any(tags, p.untrained_tags) AND trainable AS all_tagged,
            [s FOR s IN evaluated_steps IF s.trainable AND NOT s.excluded] AS trained,
            len([s FOR s IN evaluated_steps IF s.trainable AND s.excluded]) > 0 AS some_excluded
        FROM evaluated_candidates(other_policy)
    ), part AS (
        SELECT *,
            trainable AND NOT all_tagged AND NOT (some_excluded AND len(trained) = 0) AS can_train,
            CASE WHEN all_tagged THEN 0
                WHEN some_excluded THEN coalesce(list_sum([s.tokens FOR s IN trained]), 0)
                ELSE trainable_tokens END AS tokens,
            CASE WHEN NOT all_tagged AND some_excluded AND len(trained) > 0
                    AND len([s FOR s IN trained IF s.oldest IS NULL]) = 0
                THEN list_min([s.oldest FOR s IN trained])
                ELSE oldest_sync_index END AS oldest,
            training_reward_of(rewards, p.reward_weights) AS training_reward,
            [len([v FOR v IN rewards IF v.source = split_part(r, '/', 1)
                AND (NOT contains(r, '/') OR v.name = substr(r, strpos(r, '/') + 1))])
                FOR r IN p.required_rewards] AS received,
            [len([v FOR v IN rewards IF v.source = split_part(r, '/', 1) AND v.value IS NOT NULL
                AND (NOT contains(r, '/') OR v.name = substr(r, strpos(r, '/') + 1))])
                FOR r IN p.required_rewards] AS valued
        FROM split
    ), permanent AS (
        SELECT *, newest - oldest AS staleness, list_contains(received, 0) AS reward_awaited,
            NOT reward_awaited AND p.require_assessment AND assessment_revision IS NULL
                AS assessment_awaited,
            [x FOR x IN [
                CASE WHEN NOT list_contains(p.train_outcomes, outcome) THEN 'outcome' END,
                CASE WHEN NOT can_train OR payload_topic_id IS NULL
                        OR (channel = 'train' AND oldest IS NULL) THEN 'untrainable' END,
                CASE WHEN tokens < p.min_trainable_tokens THEN 'too_short' END,
                CASE WHEN prompt_tokens + coalesce(list_sum([s.tokens FOR s IN evaluated_steps]), 0)
                        > p.max_trajectory_tokens THEN 'too_long' END,
                CASE WHEN quality < p.min_quality THEN 'quality' END,
                CASE WHEN len([i FOR i IN range(1, len(received) + 1)
                            IF received[i] > 0 AND valued[i] = 0]) > 0
                        OR NOT coalesce(training_reward BETWEEN -1e6 AND 1e6, true)
                    THEN 'reward_missing' END
            ] IF x IS NOT NULL] AS reasons
        FROM part
    ), temporary AS (
        SELECT *, [x FOR x IN [
                CASE WHEN reward_awaited AND NOT list_contains(reasons, 'reward_missing')
                    THEN 'reward_missing' END,
                CASE WHEN assessment_awaited THEN 'assessment_missing' END,
                CASE WHEN staleness > staleness_limit THEN 'stale' END
            ] IF x IS NOT NULL] AS later, list_concat(reasons, later) AS unmet_conditions
        FROM permanent
    )
    SELECT run_id, trajectory_id, group_id, channel, revision,
        p.policy_version AS admission_policy_version, len(unmet_conditions) = 0 AS ready,
        (reward_awaited OR assessment_awaited) AND len(reasons) = 0 AND len(later) = 1
            AS awaiting_input,
        1 - len(unmet_conditions) / 8 AS score, unmet_conditions, staleness,
        tokens AS trainable_tokens, training_reward, quality, kafka_topic_id
    FROM temporary;

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
        p.policy_version AS admission_policy_version, len(s.unmet_conditions) = 0 AS ready,
        1 - len(s.unmet_conditions) / 4 AS score, s.unmet_conditions,
        newest - s.oldest AS staleness, s.quality
    FROM (SELECT * EXCLUDE (evaluated_steps), unnest(evaluated_steps) AS s
          FROM evaluated_candidates(NULL));

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
