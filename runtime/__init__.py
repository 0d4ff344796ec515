"""Process plumbing without domain knowledge: settings, Kafka client, broker, logs, supervision."""
