"""All that knows Hugging Face's and SGLang's model classes. A package, so that an installed one cannot hide it."""
