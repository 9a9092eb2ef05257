"""What can be said and done about responses as texts, without any model."""
