"""Define quality and readiness in SQL: views over the tables of the lake.

    findings        each finding of a quality rule, of the assessment that counts
    step_quality    each step of a closed trajectory at its newest revision: quality, assessment,
                    and whether it is trainable
    readiness       each closed trajectory under the policy in force for its run and channel: ready
                    or not, and the unmet conditions
    step_readiness  the same for each step

Readiness is that of `stream_jobs.admit.eligibility.compute_readiness`, repeated in SQL so that one
query covers a million rows; a test compares both. There is no row before a policy is in force.
"""

from __future__ import annotations

LATEST = """
    SELECT * FROM candidates_raw
    QUALIFY row_number() OVER (PARTITION BY kafka_topic_id, run_id, trajectory_id
        ORDER BY revision DESC, kafka_timestamp DESC) = 1"""

ASSESSMENTS = """
    SELECT * REPLACE (timezone('UTC', created_at) AS created_at, timezone('UTC', kafka_timestamp)
        AS kafka_timestamp)
    FROM assessments_raw
    QUALIFY row_number() OVER (PARTITION BY run_id, trajectory_id ORDER BY assessment_revision DESC,
        kafka_timestamp, kafka_offset) = 1"""

FINDINGS = """
    SELECT run_id, trajectory_id, f.rule, f.step_id, f.score, f.evidence, kafka_timestamp
    FROM (SELECT run_id, trajectory_id, kafka_timestamp, unnest(findings) AS f FROM assessments)"""

STEP_QUALITY = f"""
    SELECT run_id, trajectory_id, group_id, channel, s.step_id, s.index AS step_index, s.quality,
        s.assessed_quality, s.trainable,
           s.reason AS untrainable_reason, s.tags, s.response_tokens, s.oldest_sync_index
    FROM (SELECT run_id, trajectory_id, group_id, channel, unnest(steps) AS s FROM ({LATEST}))"""

_POLICY = """{"policy_version": "BIGINT", "required_rewards": ["VARCHAR"],
    "reward_weights": "MAP(VARCHAR, DOUBLE)",
    "max_staleness": "BIGINT", "min_trainable_tokens": "BIGINT", "max_trajectory_tokens": "BIGINT",
        "train_outcomes": ["VARCHAR"],
    "min_quality": "DOUBLE", "untrained_tags": ["VARCHAR"], "min_step_quality": "DOUBLE",
        "require_assessment": "BOOLEAN"}"""

_EVALUATED = f"""
    applied AS (
        SELECT run_id, channel, from_json(policy_json, '{_POLICY}') AS p FROM run_events_raw
            WHERE kind = 'policy_applied'
        QUALIFY row_number() OVER (PARTITION BY run_id, channel
            ORDER BY admission_policy_version DESC, kafka_timestamp DESC) = 1
    ), trains AS (
        SELECT run_id, max_by(sync_index, (kafka_timestamp, kafka_offset)) AS newest
            FROM weights_raw GROUP BY run_id
    ), known AS (
        SELECT c.*, a.p, t.newest, CASE WHEN c.channel = 'train' THEN a.p.max_staleness END
            AS staleness_limit
        FROM ({LATEST}) c JOIN applied a ON a.run_id = c.run_id AND a.channel = c.channel LEFT
            JOIN trains t ON t.run_id = c.run_id
    ), evaluated AS (
        SELECT *, [{{
            'step_id': s.step_id, 'index': s.index, 'tokens': s.response_tokens,
                'oldest': s.oldest_sync_index, 'quality': s.quality,
            'trainable': s.trainable,
            'left_out': list_has_any(s.tags, p.untrained_tags)
                OR coalesce(s.quality < p.min_step_quality, false),
            'lacks': [x FOR x IN [
                CASE WHEN NOT s.trainable THEN 'untrainable' END,
                CASE WHEN list_has_any(s.tags, p.untrained_tags) THEN 'tagged' END,
                CASE WHEN s.quality < p.min_step_quality THEN 'quality' END,
                CASE WHEN newest - s.oldest_sync_index > staleness_limit THEN 'stale' END]
                    IF x IS NOT NULL]
        }} FOR s IN steps] AS seen FROM known
    )"""

READINESS = f"""
    WITH {_EVALUATED}, split AS (
        SELECT *, list_has_any(tags, p.untrained_tags) AND trainable AS all_tagged,
               [s FOR s IN seen IF s.trainable AND NOT s.left_out] AS trained,
               len([s FOR s IN seen IF s.trainable AND s.left_out]) > 0 AS some_left_out,
               [v FOR v IN rewards IF v.step_id IS NULL AND v.value IS NOT NULL
                AND (cardinality(p.reward_weights) = 0 OR map_contains(p.reward_weights,
                    v.source || '/' || v.name))] AS terms
        FROM evaluated
    ), part AS (
        SELECT *, trainable AND NOT all_tagged AND NOT (some_left_out AND len(trained) = 0)
            AS can_train,
               CASE WHEN all_tagged THEN 0 WHEN some_left_out THEN coalesce(list_sum([s.tokens
                   FOR s IN trained]), 0)
                    ELSE trainable_tokens END AS tokens,
               CASE WHEN NOT all_tagged AND some_left_out AND len(trained) > 0 AND len([s
                   FOR s IN trained IF s.oldest IS NULL]) = 0
                    THEN list_min([s.oldest FOR s IN trained]) ELSE oldest_sync_index END AS oldest,
               list_sum([v.value * CASE WHEN cardinality(p.reward_weights) = 0 THEN 1
                         ELSE p.reward_weights[v.source || '/' || v.name] END FOR v IN terms])
                             AS training_reward,
               [len([v FOR v IN rewards IF v.source = split_part(r, '/', 1)
                     AND (NOT contains(r, '/') OR v.name = substr(r, strpos(r, '/') + 1))])
                         FOR r IN p.required_rewards] AS received,
               [len([v FOR v IN rewards IF v.source = split_part(r, '/', 1) AND v.value IS NOT NULL
                     AND (NOT contains(r, '/') OR v.name = substr(r, strpos(r, '/') + 1))])
                         FOR r IN p.required_rewards] AS valued
        FROM split
    ), lacking AS (
        SELECT *, newest - oldest AS staleness, list_contains(received, 0) AS reward_awaited,
            [x FOR x IN [
                CASE WHEN NOT list_contains(p.train_outcomes, outcome) THEN 'outcome' END,
                CASE WHEN NOT can_train OR payload_topic_id IS NULL OR (channel = 'train'
                    AND oldest IS NULL) THEN 'untrainable' END,
                CASE WHEN tokens < p.min_trainable_tokens THEN 'too_short' END,
                CASE WHEN prompt_tokens + coalesce(list_sum([s.tokens FOR s IN seen]),
                    0) > p.max_trajectory_tokens THEN 'too_long' END,
                CASE WHEN quality < p.min_quality THEN 'quality' END,
                CASE WHEN len([i FOR i IN range(1, len(received) + 1) IF received[i] > 0
                    AND valued[i] = 0]) > 0
                          OR NOT coalesce(isfinite(training_reward), true)
                              THEN 'reward_missing' END] IF x IS NOT NULL] AS reasons
        FROM part
    ), lacked AS (
        SELECT *, CASE WHEN reward_awaited THEN 'reward_missing'
                       WHEN p.require_assessment AND assessment_revision IS NULL
                           THEN 'assessment_missing' END AS awaited,
               [x FOR x IN [CASE WHEN reward_awaited AND \
NOT list_contains(reasons, 'reward_missing')
                   THEN 'reward_missing' END,
                CASE WHEN NOT reward_awaited AND p.require_assessment
                    AND assessment_revision IS NULL THEN 'assessment_missing' END,
                CASE WHEN staleness > staleness_limit THEN 'stale' END] IF x IS NOT NULL] AS later
        FROM lacking
    )
    SELECT run_id, trajectory_id, group_id, channel, revision, p.policy_version
        AS admission_policy_version,
           len(reasons) + len(later) = 0 AS ready, awaited IS NOT NULL AND len(reasons) = 0
               AND len(later) = 1 AS awaits,
           1 - (len(reasons) + len(later)) / 8 AS score, list_concat(reasons, later) AS lacks,
               staleness,
           tokens AS trainable_tokens, quality, kafka_topic_id
    FROM lacked"""

STEP_READINESS = f"""
    WITH {_EVALUATED}
    SELECT run_id, trajectory_id, group_id, channel, s.step_id, s.index AS step_index,
        p.policy_version AS admission_policy_version,
           len(s.lacks) = 0 AS ready, 1 - len(s.lacks) / 4 AS score, s.lacks, newest - s.oldest
               AS staleness, s.quality
    FROM (SELECT * EXCLUDE (seen), unnest(seen) AS s FROM evaluated)"""

VIEWS = {
    "findings": FINDINGS,
    "step_quality": STEP_QUALITY,
    "readiness": READINESS,
    "step_readiness": STEP_READINESS,
}
"""View name to query, in the order of creation. `ASSESSMENTS` is the view of a table."""
