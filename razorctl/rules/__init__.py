"""What survives of an activation between forward and backward."""
