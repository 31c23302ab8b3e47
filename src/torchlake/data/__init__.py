"""Which rows a step sees, and how they become rectangles of tokens."""
