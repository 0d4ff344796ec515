"""Environments of other libraries as flows: one file each on `environment.Environment`."""
