"""The adapter to SGLang: entry points, configuration, start-up checks, and the CPU platform."""
