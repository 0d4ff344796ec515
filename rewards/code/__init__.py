"""Run the code of an answer against the tests of its task, in a sandbox."""
