"""Block formats: how stored integers become numbers. Knows no model and no file."""
