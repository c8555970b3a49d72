"""Where models come from: the demo model, folders, GGUF files and the hub."""
