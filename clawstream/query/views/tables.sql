-- Views with the names of tables whose columns differ from those of the table.

CREATE MACRO as_utc(moment) AS timezone('UTC', moment);

CREATE MACRO latest_candidates() AS TABLE
    SELECT * FROM candidates_raw
    QUALIFY row_number() OVER (
        PARTITION BY kafka_topic_id, run_id, trajectory_id
        ORDER BY revision DESC, kafka_timestamp DESC) = 1;

CREATE VIEW trajectories AS
    WITH payload AS (
        SELECT kafka_topic_id, run_id, trajectory_id,
            any_value(metadata_json) AS metadata_json, any_value(reason) AS reason,
            flatten(list(steps ORDER BY part)) AS steps
        FROM trajectories_raw GROUP BY ALL
    )
    SELECT c.run_id, c.trajectory_id, c.trajectory_key, c.group_id, c.group_size, c.round,
        c.channel, c.outcome, p.reason,
        list_sum([r.value FOR r IN c.rewards IF r.step_id IS NULL]) AS reward,
        c.oldest_sync_index,
        list_min([s.oldest_version FOR s IN p.steps IF s.trainable AND starts_with(
            s.oldest_version, c.run_id || '/' || c.oldest_sync_index || '.')]) AS weight_version,
        c.newest_sync_index, len(c.steps)::INTEGER AS steps, c.prompt_tokens, c.trainable_tokens,
        c.trainable, c.reason AS untrainable_reason, c.quality, c.tags, c.revision, c.rewards,
        p.metadata_json, p.steps AS step_details, as_utc(c.opened_at) AS opened_at,
        as_utc(c.closed_at) AS closed_at, as_utc(c.kafka_timestamp) AS kafka_timestamp,
        c.kafka_topic_id
    FROM latest_candidates() c LEFT JOIN payload p ON p.kafka_topic_id = c.payload_topic_id
        AND p.run_id = c.run_id AND p.trajectory_id = c.trajectory_id;

COMMENT ON COLUMN trajectories.round IS 'Round of the group; null: not given.';
COMMENT ON COLUMN trajectories.outcome IS 'Why it closed, e.g. completed, failed, abandoned.';
COMMENT ON COLUMN trajectories.reason IS
    'Reason given for the outcomes failed, abandoned, lost and replaced.';
COMMENT ON COLUMN trajectories.reward IS
    'Sum of the values given to the whole trajectory; null: there is none, never 0.';
COMMENT ON COLUMN trajectories.weight_version IS
    'Id of the weights with the lowest sync index among its trainable tokens; null: unknown.';
COMMENT ON COLUMN trajectories.newest_sync_index IS
    'Highest sync index of this run among the trainable tokens; null: no version of this run.';
COMMENT ON COLUMN trajectories.steps IS 'Number of steps.';
COMMENT ON COLUMN trajectories.untrainable_reason IS
    'Why the step or trajectory can''t be trained; null: it can.';
COMMENT ON COLUMN trajectories.revision IS 'Candidate revision that this row is: the newest.';
COMMENT ON COLUMN trajectories.rewards IS
    'Rewards that count at this revision, by source, name and target.';
COMMENT ON COLUMN trajectories.step_details IS 'Steps by index, as in `trajectories_raw`.';

CREATE VIEW steps AS
    WITH inside AS (
        SELECT kafka_timestamp, run_id, trajectory_id, unnest(steps) AS step FROM trajectories_raw
    ), closed AS (
        SELECT * FROM inside
        QUALIFY row_number() OVER (
            PARTITION BY run_id, step.step_id ORDER BY kafka_timestamp DESC) = 1
    ), later AS (
        SELECT run_id, step_id, any_value(trajectory_id) AS trajectory_id,
            list(DISTINCT mark ORDER BY mark) AS marks
        FROM step_marks_raw GROUP BY ALL
    )
    SELECT s.* REPLACE (as_utc(s.received_at) AS received_at, as_utc(s.finished_at) AS finished_at,
            as_utc(s.kafka_timestamp) AS kafka_timestamp),
        coalesce(c.trajectory_id, l.trajectory_id) AS trajectory_id,
        c.step.index AS step_index, c.step.parent AS parent_index, c.step.drift AS drift,
        c.step.trainable AS trainable, c.step.untrainable_reason AS untrainable_reason,
        list_sort(list_distinct(list_concat(c.step.marks, l.marks))) AS marks
    FROM steps_raw s LEFT JOIN closed c ON c.run_id = s.run_id AND c.step.step_id = s.step_id
        LEFT JOIN later l ON l.run_id = s.run_id AND l.step_id = s.step_id;

COMMENT ON COLUMN steps.trajectory_id IS
    'Trajectory that the step ended in; null: it has not closed yet.';
COMMENT ON COLUMN steps.step_index IS 'Index of the step in its trajectory, from 0.';
COMMENT ON COLUMN steps.parent_index IS
    'Index of the step whose prompt and response this step''s prompt starts with; null: none.';
COMMENT ON COLUMN steps.drift IS
    'How the prompt continues what was sampled before; null: the trajectory has not closed yet.';
COMMENT ON COLUMN steps.trainable IS
    'True: it can be trained. Null: the trajectory has not closed yet.';
COMMENT ON COLUMN steps.untrainable_reason IS
    'Why the step or trajectory can''t be trained; null: it can.';
COMMENT ON COLUMN steps.marks IS 'Marks: late, duplicate, retried, orphan.';

-- Rewards or curations with their targets: `of_trajectory`, `of_step`, and `may_be` until the
-- trajectory is known. For a key that the gateway assigned, the step determines the trajectory;
-- that key as trajectory id means the whole trajectory.
CREATE MACRO with_targets(relation) AS TABLE
    WITH step_locations AS (
        SELECT run_id, step_id, max_by(trajectory_id, kafka_timestamp) AS trajectory_id FROM (
            SELECT run_id, unnest(steps).step_id AS step_id, trajectory_id, kafka_timestamp
            FROM trajectories_raw
            UNION ALL SELECT run_id, step_id, trajectory_id, kafka_timestamp FROM step_marks_raw
        ) GROUP BY ALL
    ), keyed AS (
        SELECT *, is_gateway_assigned(trajectory_key) AS assigned,
            coalesce(trajectory_id, trajectory_key) = trajectory_key AS by_key
        FROM query_table(relation)
    )
    SELECT s.* EXCLUDE (assigned, by_key)
            REPLACE (as_utc(created_at) AS created_at, as_utc(kafka_timestamp) AS kafka_timestamp),
        CASE WHEN s.assigned AND s.by_key THEN p.trajectory_id
            ELSE coalesce(s.trajectory_id, s.trajectory_key) END AS of_trajectory,
        CASE WHEN s.assigned AND s.trajectory_id = s.trajectory_key AND p.trajectory_id IS NOT NULL
            THEN NULL ELSE s.step_id END AS of_step,
        coalesce(of_trajectory, s.trajectory_id) AS may_be
    FROM keyed s LEFT JOIN step_locations p ON p.run_id = s.run_id AND p.step_id = s.step_id;

CREATE VIEW rewards AS
    SELECT * EXCLUDE (of_trajectory, of_step, may_be)
        REPLACE (of_trajectory AS trajectory_id, of_step AS step_id)
    FROM with_targets('rewards_raw')
    QUALIFY row_number() OVER (
        PARTITION BY run_id, trajectory_key, may_be, of_step, source, name
        ORDER BY reward_revision DESC, kafka_timestamp, kafka_offset) = 1;

COMMENT ON COLUMN rewards.trajectory_id IS
    'Target trajectory; null: that of the step is not known yet.';
COMMENT ON COLUMN rewards.step_id IS 'Target step; null: the whole trajectory.';

CREATE VIEW curation AS
    SELECT * EXCLUDE (of_trajectory, of_step, may_be)
        REPLACE (of_trajectory AS trajectory_id, of_step AS step_id)
    FROM with_targets('curation_raw');

COMMENT ON COLUMN curation.trajectory_id IS
    'Target trajectory; null: that of the step is not known yet.';
COMMENT ON COLUMN curation.step_id IS 'Target step; null: the whole trajectory.';

-- Of each field the last value holds, as in `stream_jobs/assemble/state/annotations.py`, of the marks
-- that were not taken back. A field that is null says nothing, and `max_by` omits it.
CREATE VIEW curated AS
    SELECT run_id, trajectory_key, trajectory_id, step_id,
        max_by(quality, (kafka_timestamp, kafka_offset)) AS quality,
        max_by(trainable, (kafka_timestamp, kafka_offset)) AS trainable,
        max_by(tags, (kafka_timestamp, kafka_offset)) AS tags,
        max_by(note, (kafka_timestamp, kafka_offset)) AS note,
        max_by("by", (kafka_timestamp, kafka_offset)) AS last_by,
        max(kafka_timestamp) AS last_at, count(*)::INTEGER AS marks
    FROM curation m ANTI JOIN curation b
        ON b.run_id = m.run_id AND b.trajectory_key = m.trajectory_key AND b.takes_back = m.event_id
    WHERE takes_back IS NULL GROUP BY ALL;

COMMENT ON COLUMN curated.trajectory_id IS
    'Target trajectory; null: that of the step is not known yet.';
COMMENT ON COLUMN curated.step_id IS 'Target step; null: the whole trajectory.';
COMMENT ON COLUMN curated.quality IS 'Quality in [0, 1] that holds; null: no mark gave one.';
COMMENT ON COLUMN curated.trainable IS 'Whether it may be trained; null: no mark said so.';
COMMENT ON COLUMN curated.tags IS 'Labels that hold; null: no mark gave any.';
COMMENT ON COLUMN curated.note IS 'Last note.';
COMMENT ON COLUMN curated.last_by IS 'Who made the last mark.';
COMMENT ON COLUMN curated.last_at IS 'Time of the last mark, by the log''s clock.';
COMMENT ON COLUMN curated.marks IS 'Number of marks that were not taken back.';

CREATE VIEW assessments AS
    SELECT * REPLACE (as_utc(created_at) AS created_at, as_utc(kafka_timestamp) AS kafka_timestamp)
    FROM assessments_raw
    QUALIFY row_number() OVER (
        PARTITION BY run_id, trajectory_id
        ORDER BY assessment_revision DESC, assessments_raw.kafka_timestamp, kafka_offset) = 1;
