"""What `predict` makes of the rows of files, by task: a file for each kind of answer."""
