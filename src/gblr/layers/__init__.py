"""nn.Modules over matrices."""
