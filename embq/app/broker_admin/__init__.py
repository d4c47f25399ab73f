"""Users, passwords and certificates of a broker that other machines reach: `embq broker`."""
