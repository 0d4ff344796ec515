"""The state of one partition: values, changes and lookup tables. Pure."""
