"""What the inspector gets from other processes: policies, query sandbox, the installation now."""
