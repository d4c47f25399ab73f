"""The MMoCLIP benchmark under JUBE, and what one GPU gives of it."""
