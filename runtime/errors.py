"""What the plumbing raises: one root, so that a process can tell its own trouble from a bug."""


class PlumbingError(Exception):
    """Something under the processes (broker, jars, Kafka client, settings) cannot do its work; the message says what to do."""


class InUse(PlumbingError):
    """Another process has what only one can have: a port, a data directory. Stop that process, or choose another."""
