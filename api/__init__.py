"""The HTTP front: parses, asks the broker, answers. Knows neither torch nor celery."""
