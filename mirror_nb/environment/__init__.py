"""What a process has set for all of its code, outside of any object: where one has set its own, others do too."""
