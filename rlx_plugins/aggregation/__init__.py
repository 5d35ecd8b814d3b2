"""How token losses become one number: the weight of each token, and what the sum is divided by."""
