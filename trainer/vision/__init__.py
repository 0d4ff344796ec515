"""Images: from recorded files to the inputs of a vision-language model."""
