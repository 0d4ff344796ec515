"""Process plumbing that knows no record: settings, the Kafka client, the broker, logs, supervision, the command line."""
