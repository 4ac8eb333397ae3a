"""Published methods against class disparity that MR2 is compared with."""
