"""The contract between processes: records, topics, ids, encoding, settings.

Pure: no I/O beyond reading the package's own files; `user_function` also imports users' files.
"""
