"""Bytes and send schedules of DiLoCo's outer loops, in closed form."""
