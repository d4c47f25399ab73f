"""`embq serve --embeddings`: models that embed texts over HTTP, for clients of OpenAI and text-embeddings-inference."""
