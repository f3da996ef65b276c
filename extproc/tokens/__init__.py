"""Token ids of prompts, for precise profiles: local tokenizer files, or an engine or render server that is asked."""
