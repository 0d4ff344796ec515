"""The comparison job: rewards by judges that compare the members of a group."""
