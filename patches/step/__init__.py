"""Put the decode step into SGLang, on every device."""
