-- How far each call came on the way to training, and why it went no further.

CREATE VIEW funnel AS
    WITH refused AS (
        SELECT run_id, trajectory_id, max_by(reason, kafka_timestamp) AS reason
        FROM (SELECT run_id, unnest(trajectory_ids) AS trajectory_id, reason, kafka_timestamp
              FROM groups_raw WHERE NOT admitted)
        GROUP BY ALL
    ), closed AS (
        SELECT run_id, trajectory_id, max_by(channel, kafka_timestamp) AS channel,
            max_by(group_id, kafka_timestamp) AS group_id,
            max_by(reward IS NOT NULL, kafka_timestamp) AS rewarded
        FROM trajectories GROUP BY ALL
    ), admitted AS (
        SELECT DISTINCT run_id, unnest(trajectory_ids) AS trajectory_id
        FROM groups_raw WHERE admitted
    ), trained AS (
        SELECT t.run_id, t.s.step_id, bool_or(t.s.untrained_reason IS NULL) AS trained,
            any_value(t.s.untrained_reason) AS untrained_reason
        FROM (SELECT run_id, version_id, unnest(steps) AS s FROM trained_trajectories_raw) t
            SEMI JOIN (FROM lineage_versions WHERE surviving) v ON v.version_id = t.version_id
        GROUP BY ALL
    ), reached AS (
        SELECT s.run_id, coalesce(c.channel, s.channel) AS channel,
            coalesce(c.group_id, s.group_id) AS group_id, s.trajectory_id, s.call_id, s.step_id,
            CASE WHEN t.trained THEN 5 WHEN a.trajectory_id IS NOT NULL THEN 4
                WHEN c.rewarded THEN 3
                WHEN s.step_index IS NOT NULL THEN 2 ELSE 1 END AS stage_number,
            CASE stage_number WHEN 5 THEN NULL WHEN 4 THEN t.untrained_reason
                WHEN 1 THEN list_first([m FOR m IN s.marks IF m IN ('late', 'orphan')])
                ELSE r.reason END AS lost_reason
        FROM steps s
            LEFT JOIN closed c ON c.run_id = s.run_id AND c.trajectory_id = s.trajectory_id
                AND s.step_index IS NOT NULL
            LEFT JOIN admitted a ON a.run_id = s.run_id AND a.trajectory_id = s.trajectory_id
                AND s.step_index IS NOT NULL
            LEFT JOIN trained t ON t.run_id = s.run_id AND t.step_id = s.step_id
            LEFT JOIN refused r ON r.run_id = s.run_id AND r.trajectory_id = s.trajectory_id
        UNION ALL BY NAME
        SELECT run_id, channel, group_id, 0 AS stage_number,
            concat_ws(' ', source, status, error_type) AS lost_reason
        FROM failed_calls_raw
    )
    SELECT run_id, channel, group_id, trajectory_id, call_id, step_id, stage_number,
        ['called', 'recorded', 'assembled', 'rewarded', 'admitted', 'trained'][stage_number + 1]
            AS stage,
        lost_reason
    FROM reached;

COMMENT ON COLUMN funnel.run_id IS 'Run of the call.';
COMMENT ON COLUMN funnel.channel IS 'Channel: train or val; null: not said.';
COMMENT ON COLUMN funnel.group_id IS 'Group; null: not said.';
COMMENT ON COLUMN funnel.trajectory_id IS 'Trajectory that the step ended in; null: none yet.';
COMMENT ON COLUMN funnel.call_id IS 'Call; null: it failed.';
COMMENT ON COLUMN funnel.step_id IS 'Step, a sampled choice of the call; null: the call failed.';
COMMENT ON COLUMN funnel.stage_number IS 'Number of the stage, from 0.';
COMMENT ON COLUMN funnel.stage IS
    'Last stage that it reached: called, recorded (a step), assembled (in a closed trajectory), rewarded (that trajectory has a reward), admitted (in a batch), trained (into a surviving version).';
COMMENT ON COLUMN funnel.lost_reason IS
    'Why it goes no further; null: it is trained, or may still be; validation ends as admitted.';
