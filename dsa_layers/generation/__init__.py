"""From prompts to text: tokenizer and chat template, passes over a cache, sampling."""
