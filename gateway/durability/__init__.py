"""From a record to Kafka or, when Kafka does not acknowledge, to the fsynced spool."""
