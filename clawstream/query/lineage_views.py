"""Define the SQL of lineage: from a weight version to the steps it was trained on, and back.

Three views for analysts, whose queries `clawstream.query.lineage` also runs on pruned tables:

    lineage_versions  each version: parent, the batches it was trained on, and whether it is on the
                      surviving chain of its run
    lineage_steps     each step of each admitted trajectory, at the admitted revision: the versions
                      that trained its batch (null: none yet), whether it was trained itself and why
                      not, and the versions that sampled it
    lineage_tokens    each step's sampled tokens by the version that sampled them; null: unknown

The topic id and number identify a batch: a recreated topic starts with batch 0 again. Two versions
may name one batch: a trainer that was killed trains it again from its checkpoint, and only one of
the two is on the surviving chain, which follows `parent_version` from the newest version on the
log. Whether a step is trained follows the trainer (`trainer.data.sequences`): it omits members
without a training reward and groups with fewer than two members left to compare.
"""

from __future__ import annotations

CHAIN = """
    WITH RECURSIVE known AS (
        SELECT * FROM {weights}
        QUALIFY row_number() OVER (PARTITION BY version_id ORDER BY kafka_timestamp DESC,
            kafka_offset DESC) = 1
    ), surviving(version_id, parent_version) AS (
        SELECT version_id, parent_version FROM known
        QUALIFY row_number() OVER (PARTITION BY run_id, channel ORDER BY kafka_timestamp DESC,
            kafka_offset DESC) = 1
        UNION SELECT k.version_id, k.parent_version FROM known k JOIN surviving s
            ON k.version_id = s.parent_version
    )
    SELECT k.version_id, k.run_id, k.channel, k.sync_index, k.attempt, k.parent_version,
           k.version_id IN (SELECT version_id FROM surviving) AS surviving,
           k.batches_topic_id, k.first_batch_seq, k.last_batch_seq, k.metrics, k.checkpoint_url,
           timezone('UTC', k.created_at) AS created_at, timezone('UTC', k.kafka_timestamp)
               AS published_at
    FROM known k"""

_SAMPLED_BY = """CASE WHEN len(t.versions) > 0 THEN list_sort(list_distinct([v.version
    FOR v IN t.versions]))
                WHEN t.step_id IS NULL THEN list_sort(list_distinct(list_filter([s.oldest_version,
                    s.newest_version], lambda v: v IS NOT NULL)))
                ELSE list_sort(list_distinct(list_filter([t.version_first, t.version_last],
                    lambda v: v IS NOT NULL))) END"""

STEPS = """
    WITH members AS (
        SELECT run_id, channel, kafka_topic_id AS batches_topic_id, batch_seq, group_id, round,
            admission_policy_version,
               n, list_count(rewards) AS rewarded, unnest(members) AS m, unnest(rewards) AS reward,
                   unnest(staleness) AS staleness
        FROM {groups} WHERE admitted
    ), inside AS (
        SELECT m.*, p.opened_at, p.closed_at, unnest(p.steps) AS s
        FROM members m JOIN {trajectories} p ON p.kafka_topic_id = m.m.place.topic_id
             AND p.kafka_partition = m.m.place.partition AND p.kafka_offset <= m.m.place.last_offset
             AND p.run_id = m.run_id AND p.trajectory_id = m.m.trajectory_id
    ), evaluated AS (
        SELECT *, CASE WHEN reward IS NULL THEN 'no training reward'
                       WHEN rewarded < 2 AND n >= 2
                           THEN 'fewer than two training rewards in its group'
                       WHEN NOT s.trainable THEN coalesce(s.untrainable_reason, 'untrainable')
                       WHEN list_contains(m.untrainable_steps, s.step_id)
                       THEN 'left out by curation, or by policy ' || admission_policy_version
                       WHEN s.segment IS NULL OR s.response_tokens = 0 THEN 'no sampled tokens' END
                           AS untrained_reason
        FROM inside
    )
    SELECT v.version_id, v.surviving, j.run_id, j.channel, j.batches_topic_id, j.batch_seq,
        j.group_id, j.round,
           j.m.trajectory_id AS trajectory_id, j.m.revision AS revision, j.reward, j.staleness,
           j.admission_policy_version,
           s.step_id, s.index AS step_index, s.parent AS parent_index, s.response_tokens,
           j.untrained_reason IS NULL AND v.version_id IS NOT NULL AS trained, j.untrained_reason,
           {sampled_by} AS sampled_by, [x.name FOR x IN s.tags] AS tags, s.drift
    FROM evaluated j
         LEFT JOIN {versions} v ON v.run_id = j.run_id AND v.channel = j.channel
             AND v.batches_topic_id = j.batches_topic_id
              AND j.batch_seq BETWEEN v.first_batch_seq AND v.last_batch_seq
         LEFT JOIN {steps} t ON t.run_id = j.run_id AND t.step_id = s.step_id"""

TOKENS = """
    WITH spans AS (
        SELECT run_id, step_id, len(response_token_ids) AS tokens,
               CASE WHEN len(versions) > 0 THEN versions
                    WHEN version_first = version_last AND len(response_token_ids) > 0
                    THEN [{{'version': version_first, 'start': 0,
                        'end': len(response_token_ids)::INTEGER}}]
                    WHEN len(response_token_ids) > 0
                    THEN [{{'version': NULL, 'start': 0,
                        'end': len(response_token_ids)::INTEGER}}] END AS spans
        FROM {steps}
    )
    SELECT run_id, step_id, span.version AS version, span.start AS first_token, span.end
        AS end_token
    FROM (SELECT run_id, step_id, unnest(spans) AS span FROM spans)"""


def steps_of(versions: str, groups: str, trajectories: str, steps: str) -> str:
    """Return the query of `lineage_steps` over relations with the columns of the tables.

    Args:
        versions: a relation with the columns of `lineage_versions`.
    """
    return STEPS.format(
        versions=versions,
        groups=groups,
        trajectories=trajectories,
        steps=steps,
        sampled_by=_SAMPLED_BY,
    )


VIEWS = {
    "lineage_versions": CHAIN.format(weights="weights_raw"),
    "lineage_steps": steps_of("lineage_versions", "groups_raw", "trajectories_raw", "steps_raw"),
    "lineage_tokens": TOKENS.format(steps="steps_raw"),
}
"""View name to query, in the order of creation."""
