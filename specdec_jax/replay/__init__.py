"""What a stopping rule would have done on recorded texts, and what that costs by a machine's costs."""
