"""The embedded broker: a real single-node Apache Kafka on this machine."""
