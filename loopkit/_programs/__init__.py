"""Programs that are known already: the very same functions, or the same equations."""
