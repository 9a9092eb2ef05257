"""What is wrong with a run: the type, the fixes and the output of what check, train and doctor say."""
