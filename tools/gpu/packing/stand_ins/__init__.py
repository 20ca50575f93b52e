"""Files that `tools/gpu/pack` puts in place of some of SGLang's."""
