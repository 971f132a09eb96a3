"""The HTTP process: OpenAI routes, templates, text in and out. Never imports torch, radix or scheduler."""
