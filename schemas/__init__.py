"""What requests may hold and how answers look, whichever way they come: over HTTP, or as lines of a batch. Pure."""
