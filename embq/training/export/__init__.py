"""`embq train export`: a trained model as a folder that the workers load."""
