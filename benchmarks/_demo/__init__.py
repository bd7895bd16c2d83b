"""The recipes, dense and compressed, over links of a set speed."""
