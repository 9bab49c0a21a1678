"""What runs inside one replica: its worker, its shell, and the scope around every cell and call."""
