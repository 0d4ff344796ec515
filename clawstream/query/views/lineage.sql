-- Lineage: from a weight version to the steps it was trained on, and back.
--
-- The topic id and number identify a batch: a recreated topic starts with batch 0 again. Two
-- versions may name one batch: a trainer that was killed trains it again from its checkpoint, and
-- only one of the two is on the surviving chain, which follows `parent_version` from the newest
-- version on the log. Whether a step was trained, and why not, is what the trainer recorded with
-- the version (`trained_trajectories`). `clawstream/query/lineage.py` calls the macros with pruned
-- copies of the tables.

CREATE VIEW lineage_versions AS
    WITH RECURSIVE known AS (
        SELECT * FROM weights_raw
        QUALIFY row_number() OVER (
            PARTITION BY version_id ORDER BY kafka_timestamp DESC, kafka_offset DESC) = 1
    ), surviving(version_id, parent_version) AS (
        SELECT version_id, parent_version FROM known
        QUALIFY row_number() OVER (
            PARTITION BY run_id, channel ORDER BY kafka_timestamp DESC, kafka_offset DESC) = 1
        UNION SELECT k.version_id, k.parent_version
        FROM known k JOIN surviving s ON k.version_id = s.parent_version
    )
    SELECT k.version_id, k.run_id, k.channel, k.sync_index, k.attempt, k.parent_version,
        k.version_id IN (SELECT version_id FROM surviving) AS surviving,
        k.batches_topic_id, k.first_batch_seq, k.last_batch_seq, k.metrics, k.checkpoint_version,
        as_utc(k.created_at) AS created_at, as_utc(k.kafka_timestamp) AS published_at
    FROM known k;

COMMENT ON COLUMN lineage_versions.surviving IS
    'True: the newest version of the run comes from this one, or is it.';
COMMENT ON COLUMN lineage_versions.published_at IS
    'Time at which it was published, by the log''s clock.';

CREATE MACRO lineage_steps_of(versions, groups, trajectories, steps, decisions) AS TABLE
    WITH members AS (
        SELECT run_id, channel, kafka_topic_id AS batches_topic_id, batch_seq, group_id, round,
            admission_policy_version, unnest(members) AS m, unnest(rewards) AS reward,
            unnest(staleness) AS staleness
        FROM query_table(groups) WHERE admitted
    ), inside AS (
        SELECT m.*, p.opened_at, p.closed_at, unnest(p.steps) AS s
        FROM members m JOIN query_table(trajectories) p
            ON p.kafka_topic_id = m.m.place.topic_id AND p.kafka_partition = m.m.place.partition
            AND p.kafka_offset <= m.m.place.last_offset
            AND p.run_id = m.run_id AND p.trajectory_id = m.m.trajectory_id
    ), recorded AS (
        SELECT t.version_id, t.batch_seq, t.trajectory_id, unnest(t.steps) AS d
        FROM query_table(decisions) t
    )
    SELECT v.version_id, v.surviving, j.run_id, j.channel, j.batches_topic_id, j.batch_seq,
        j.group_id, j.round, j.m.trajectory_id AS trajectory_id, j.m.revision AS revision,
        j.reward, j.staleness, j.admission_policy_version, s.step_id, s.index AS step_index,
        s.parent AS parent_index, s.response_tokens,
        r.version_id IS NOT NULL AND r.d.untrained_reason IS NULL AS trained,
        r.d.untrained_reason AS untrained_reason,
        list_sort(list_distinct(CASE
            WHEN len(t.versions) > 0 THEN [span.version FOR span IN t.versions]
            WHEN t.step_id IS NULL
            THEN [x FOR x IN [s.oldest_version, s.newest_version] IF x IS NOT NULL]
            ELSE [x FOR x IN [t.version_first, t.version_last] IF x IS NOT NULL]
            END)) AS sampled_by,
        [tag.name FOR tag IN s.tags] AS tags, s.drift
    FROM inside j
        LEFT JOIN query_table(versions) v ON v.run_id = j.run_id AND v.channel = j.channel
            AND v.batches_topic_id = j.batches_topic_id
            AND j.batch_seq BETWEEN v.first_batch_seq AND v.last_batch_seq
        LEFT JOIN recorded r ON r.version_id = v.version_id AND r.batch_seq = j.batch_seq
            AND r.trajectory_id = j.m.trajectory_id AND r.d.step_id = s.step_id
        LEFT JOIN query_table(steps) t ON t.run_id = j.run_id AND t.step_id = s.step_id;

CREATE VIEW lineage_steps AS
    FROM lineage_steps_of('lineage_versions', 'groups_raw', 'trajectories_raw', 'steps_raw',
        'trained_trajectories_raw');

COMMENT ON COLUMN lineage_steps.version_id IS
    'Weight version that was trained on the step''s batch; null: none yet.';
COMMENT ON COLUMN lineage_steps.surviving IS
    'True: the newest version of the run comes from that version, or is it.';
COMMENT ON COLUMN lineage_steps.batches_topic_id IS 'Id of the topic of the batch.';
COMMENT ON COLUMN lineage_steps.batch_seq IS 'Number of the batch.';
COMMENT ON COLUMN lineage_steps.round IS 'Round of the group.';
COMMENT ON COLUMN lineage_steps.trajectory_id IS 'Trajectory.';
COMMENT ON COLUMN lineage_steps.revision IS 'Candidate revision that was admitted.';
COMMENT ON COLUMN lineage_steps.reward IS
    'Training reward of the trajectory; null: it has none.';
COMMENT ON COLUMN lineage_steps.staleness IS
    'Versions between the trajectory''s oldest trainable token and the version that its batch trains; null: unknown.';
COMMENT ON COLUMN lineage_steps.step_id IS 'Step: `<call id>.<choice>`.';
COMMENT ON COLUMN lineage_steps.step_index IS 'Index of the step in its trajectory, from 0.';
COMMENT ON COLUMN lineage_steps.parent_index IS
    'Index of the step whose prompt and response this step''s prompt starts with; null: none.';
COMMENT ON COLUMN lineage_steps.response_tokens IS 'Number of sampled tokens.';
COMMENT ON COLUMN lineage_steps.trained IS 'True: its tokens were trained.';
COMMENT ON COLUMN lineage_steps.untrained_reason IS
    'Why that version was not trained on its tokens, by the trainer; null: it was, or no version was trained on the batch yet.';
COMMENT ON COLUMN lineage_steps.sampled_by IS
    'Ids of the weight versions that sampled its tokens.';
COMMENT ON COLUMN lineage_steps.tags IS 'Names of the step''s tags.';
COMMENT ON COLUMN lineage_steps.drift IS 'How the prompt continues what was sampled before.';

CREATE MACRO lineage_tokens_of(steps) AS TABLE
    WITH spans AS (
        SELECT run_id, step_id, CASE
            WHEN len(versions) > 0 THEN versions
            WHEN len(response_token_ids) > 0
            THEN [{'version': CASE WHEN version_first = version_last THEN version_first END,
                   'start': 0, 'end': len(response_token_ids)::INTEGER}] END AS spans
        FROM query_table(steps)
    )
    SELECT run_id, step_id, span.version AS version, span.start AS first_token,
        span.end AS end_token
    FROM (SELECT run_id, step_id, unnest(spans) AS span FROM spans);

CREATE VIEW lineage_tokens AS FROM lineage_tokens_of('steps_raw');

COMMENT ON COLUMN lineage_tokens.version IS
    'Id of the weight version that sampled the tokens; null: not known.';
COMMENT ON COLUMN lineage_tokens.first_token IS
    'First token, counted in response tokens of the step, from 0.';
COMMENT ON COLUMN lineage_tokens.end_token IS 'One past the last token.';

-- A token that was trained by an abandoned version, too, has a row for each.
CREATE VIEW trained_tokens AS
    WITH aligned AS (
        SELECT t.run_id, t.version_id, t.batch_seq, t.updates, t.trajectory_id, t.step_id,
            s.versions, CASE WHEN s.version_first = s.version_last THEN s.version_first END
                AS only_version,
            unnest(range(len(t.advantages))) AS token,
            unnest(s.response_token_ids) AS token_id,
            unnest(s.response_logprobs) AS engine_logprob,
            unnest(t.logprobs) AS trainer_logprob,
            unnest(t.advantages) AS advantage
        FROM trained_tokens_raw t LEFT JOIN steps_raw s
            ON s.run_id = t.run_id AND s.step_id = t.step_id
    )
    SELECT t.run_id, t.version_id, v.parent_version AS trained_from, v.surviving, t.batch_seq,
        t.updates, t.trajectory_id, t.step_id, t.token, t.token_id,
        coalesce(list_first([x.version FOR x IN t.versions
            IF t.token >= x."start" AND t.token < x."end"]), t.only_version) AS sampled_by,
        t.engine_logprob, t.trainer_logprob, t.engine_logprob - t.trainer_logprob AS difference,
        exp(t.trainer_logprob - t.engine_logprob) AS ratio, t.advantage
    FROM aligned t LEFT JOIN lineage_versions v ON v.version_id = t.version_id
    WHERE NOT isnan(t.advantage);

COMMENT ON COLUMN trained_tokens.trained_from IS 'Version that training began from: its parent.';
COMMENT ON COLUMN trained_tokens.surviving IS
    'True: the newest version of the run comes from the trained one, or is it.';
COMMENT ON COLUMN trained_tokens.token IS 'Index of the token in the response, from 0.';
COMMENT ON COLUMN trained_tokens.token_id IS 'Token id.';
COMMENT ON COLUMN trained_tokens.sampled_by IS
    'Weight version that sampled the token; null: not known.';
COMMENT ON COLUMN trained_tokens.engine_logprob IS
    'Log-probability that the engine gave at sampling, in nats.';
COMMENT ON COLUMN trained_tokens.trainer_logprob IS
    'Log-probability of the trainer''s first training pass, in nats; null: no pass was needed, because the advantage is 0.';
COMMENT ON COLUMN trained_tokens.difference IS
    'Engine minus trainer, in nats. With `updates` 0 and `sampled_by` = `trained_from` the weights are the same.';
COMMENT ON COLUMN trained_tokens.ratio IS
    'Importance ratio: the trainer''s probability divided by the engine''s.';
COMMENT ON COLUMN trained_tokens.advantage IS 'Advantage of the token.';
