"""`embq verify`: checks an output folder against its commit log and a second reading of the inputs."""
