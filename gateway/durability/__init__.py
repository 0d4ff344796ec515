"""Delivery of records to Kafka or, when Kafka does not acknowledge, to the fsynced spool."""
