"""The data plane: one OpenAI-compatible address in front of every replica. Nothing here touches Django's
request path."""
