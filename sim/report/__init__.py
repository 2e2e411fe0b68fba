"""What people read: numbers and layout that text, pictures and pages share, and files for other tools."""
