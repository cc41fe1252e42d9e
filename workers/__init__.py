"""The Celery worker of a device: drains model queues in batches and settles them.

The Celery application is `workers.app:app`; the process of one device is `workers.device:main`.
"""
