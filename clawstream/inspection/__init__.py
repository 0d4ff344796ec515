"""What the inspector gets from other processes: policies of admission, and the query sandbox."""
