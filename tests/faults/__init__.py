"""The fault matrix: each test injects one fault into real processes and ends by checking the data set."""
