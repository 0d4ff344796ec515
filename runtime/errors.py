"""What the plumbing raises: one root, so that a process can tell its own trouble from a bug."""


class PlumbingError(Exception):
    """Something under the processes (broker, jars, Kafka client, settings) cannot do its work; the message says what to do."""
