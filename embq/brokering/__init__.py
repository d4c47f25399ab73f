"""What `embq broker init` makes for a broker that other machines reach: users, passwords and certificates."""
